"""``tdserve bench``: what tdserve reaches, beside the floors of the same machine in the same minutes.

A figure of a server means little without the speed of the wire and of the memory under it, and figures of one machine
move by a factor of two between runs. So every workload measures its floors and tdserve alternately, round by round,
and reports the ratio.
"""
