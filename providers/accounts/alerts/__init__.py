"""Spend alerts: their records, the sums that they are compared with, and the e-mails that one worker of all sends."""
