"""Lazy stacks, and other holders of rows that differ in structure: how they are captured, stored and rebuilt."""
