"""Non-tensor values as bytes, and back."""
