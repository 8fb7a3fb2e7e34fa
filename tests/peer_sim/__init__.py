"""Whole peers in virtual time: the real driver, global state, transfers, checkpoints, supervision and learner's link,
on a simulated host.

What is simulated is the world alone: the clock, threads, connections, disks, processes. ``simulation/`` drives the
protocol machine without all that, a hundred times as fast.

Everything here runs in a process of its own (``worker``), since chunks must be small there (``knobs``).
"""
