"""``tdserve demo``: two actors and a learner, separate processes, train a DQN through one tdserve server.

Read in this order: ``stores`` (what is shared), ``actor``, ``learner``, ``dqn``; the rest starts, watches and draws::

    actor 0 ──extend──► transitions ──sample──► learner, which also starts the others
    actor 1 ──extend──► episodes ─────read────►    │    and shows how the run goes
       ▲ ▲                                         │
       └─┴──────latest── policy ◄──────publish─────┘
"""
