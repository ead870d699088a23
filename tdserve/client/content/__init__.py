"""Content as a client holds it: tensors in the order in which they are sent, values, padding, devices."""
