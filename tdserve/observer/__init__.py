"""The observer: a process that shows a server's figures by HTTP, to Prometheus and to people. An ordinary client.

Read ``app`` first: the routes. ``access`` and ``viewers`` decide who sees what, ``snapshots`` has the figures,
``security_headers`` goes with every answer. Metrics: ``metrics_routes`` and ``exposition``, from ``metric_table``,
which ``metric_guide`` prints. ``pages`` are for people.
"""
