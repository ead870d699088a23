"""``tdserve bench``: what tdserve reaches, beside the floors of the same machine in the same minutes.

A figure of a server means little without the speed of the wire and of the memory under it, and figures of one machine
move by a factor of two between runs. So every workload measures its floors and tdserve alternately, round by round,
and reports the ratio.

Read ``runs`` first, with ``bench_options``; the ``workloads`` measure on a ``stage``. The other modules, by what they
are for:

1. Measurement: ``measure`` (rounds and medians), ``cpu_times``, ``workload_data``; ``child`` is a process of the
   benchmark.
2. Floors: ``floors``, with ``floor_link`` and ``grpc_link``; ``torchrl_buffer`` is TorchRL's own buffer.
3. What is shown: ``figures`` and ``targets``, ``report``, ``comparison`` and ``comparison_report``, ``picture``,
   ``machine_facts`` and ``fitted_table``.
4. Models: ``cost_model`` and ``call_costs``, shown by ``cost_report``; ``occupancy_model`` and ``occupancy_report``;
   ``simulation``, with ``simulated_cluster`` and ``simulated_time``.
5. ``peers``: other systems at the same jobs.
"""
