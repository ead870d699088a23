"""Content as a client holds it: tensors in the order in which they travel, values, padding, devices."""
