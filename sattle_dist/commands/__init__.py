"""The commands of `sattle`, one file each; heavy imports wait until a command runs."""
