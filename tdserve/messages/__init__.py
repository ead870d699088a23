"""How content and requests are spelt in bytes: layouts, index expressions, row numbers, non-tensor values."""
