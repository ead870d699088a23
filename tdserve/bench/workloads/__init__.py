"""The workloads: each writes and reads its own stores and yields its figures one by one."""
