"""``tdserve demo``: two actors and a learner, separate processes, train a DQN through one tdserve server.

Read in this order: ``demo_stores`` (what is shared), ``actor`` with ``rollout``, ``learner``, ``dqn`` (the learning
rule). The rest starts, watches and draws: ``demo_run``, with ``demo_options`` and ``processes``, then ``watch``,
``run_display`` and ``run_report``::

    actor 0 ──extend──► transitions ──sample──► learner, which also starts the others
    actor 1 ──extend──► episodes ─────read────►    │    and shows how the run goes
       ▲ ▲                                         │
       └─┴──────latest── policy ◄──────publish─────┘
"""
