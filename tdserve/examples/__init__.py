"""Programs to copy from. They use what ``import tdserve`` offers, and nothing else of the package but its errors.

``demo`` and ``collectors`` are packages of their own. The others are single files: ``grpo`` and ``verl_rollouts``
(language models), ``ray_replay`` and ``ray_train``, ``vector_envs``. ``cleanrl_dqn``, ``torchrl_dqn`` and ``sb3_dqn``
have their buffer on a server; ``cleanrl_dqn_before``, ``torchrl_dqn_before`` and ``sb3_dqn_before`` do not.
``frames_per_second`` and ``learning_curves`` compare both.
"""
