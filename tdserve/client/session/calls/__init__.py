"""A call of a user: how long it may take, what ends it, whether it is tried again, and what is noted of it.

Read ``call_deadline`` and ``timeouts`` first, then ``call_conditions``, ``cancellation`` and ``reach``. Calls that
return early are ``background_calls``, with ``awaitable_future``, ``call_order`` and ``deadline_watch``.
``call_traces``, ``observed_calls`` and ``step_counts`` keep what is known of calls.
"""
