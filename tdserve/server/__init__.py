"""The control process: the one owner of every decision. It never touches tensor content, and never imports torch."""
