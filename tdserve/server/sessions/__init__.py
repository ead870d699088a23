"""The clients of the control process: their sessions, their local connections, and what moves their content."""
