"""The byte formats of content and requests: layouts, index expressions, row numbers, non-tensor values."""
