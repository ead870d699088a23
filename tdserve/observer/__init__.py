"""The observer: a process that shows a server's figures by HTTP, to Prometheus and to people. An ordinary client."""
