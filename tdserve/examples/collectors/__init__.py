"""Several collectors, a GPU each where there are any, and a learner: one job, started in either of two ways.

``python -m tdserve.examples.collectors --collectors 4`` starts the processes itself, and a server unless ``--address``
names one. ``torchrun --nproc-per-node 3 -m tdserve.examples.collectors`` starts them from outside: rank 0 learns, the
others collect. Read in this order: ``task`` (what is learned, and what is shared), ``collector``, ``training`` (the
learner)::

    collector 0 (cuda:0) ──extend──┐                        ┌──► rows/s, versions seen
    collector 1 (cuda:1) ──extend──┼─► rows ──sample──► learner
              ▲                    │                        │
              └───────latest───────┴──────── policy ◄────publish
"""
