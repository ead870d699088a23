"""The console script: one file per command, options and rendering shared. A command only asks, and shows the answer."""
