"""The interfaces of other systems, thinly translated: change an import line, and a program of theirs runs."""
