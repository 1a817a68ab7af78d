"""Model files on this machine: what a command line or a page shows of them and does with them."""
