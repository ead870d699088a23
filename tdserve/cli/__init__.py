"""The console script: one file per command, options and rendering shared. Commands ask and show, nothing more."""
