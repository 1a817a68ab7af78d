"""Run configs to start from: one file per way of running a stack. `stack run NAME` finds them by name."""
