"""The console script. A command only asks, and shows the answer.

``main`` is the command group; every command has a file of its own, in the room of its subject: ``stores`` (listing and
deleting), ``rows``, ``files`` (copying in and out), ``figures`` (of servers), ``moves`` (of whole stores), ``serving``
(running a server) and ``trying`` (demo, bench, guide). ``figures`` and ``rows`` also show what ``stores`` does. All
share two rooms: ``shell`` (options, exit codes; the command ``completion``) and ``screen`` (how answers look).
"""
