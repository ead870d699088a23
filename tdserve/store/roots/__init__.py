"""The root folder of a server, and whole stores that leave it.

Read ``root`` first: its owner, its layout, and the proof of one machine; then ``run_record`` (whether the last run
ended in order) and ``file_sums`` (checksums of files at that end). ``record_file`` is a store's own copy of its
record, ``moved_files`` are those of a store that moves, ``archive`` is where checkpoints lie.
"""
