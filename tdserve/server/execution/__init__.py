"""How a request runs in the control process, whatever it asks for: on one event loop, within a budget of memory, and
once however often it is sent. Nothing here opens or reads a store.

Read ``inline_tasks`` (a task's first step runs at once), ``turns`` (long work in pieces) and ``waiting`` (the queue of
waiting calls, which ends them when their store is sealed or gone) first; then ``idempotency``: the answers that are
kept for retries. ``admission_budget`` and ``rule_memory`` refuse what would take too much memory, ``reported_faults``
is what a client learns of a fault, ``traces`` has the spans of requests, and ``garbage`` keeps Python's collector from
stopping all of them.
"""
