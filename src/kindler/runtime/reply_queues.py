"""The queues of clients, on which they get their reports."""

REPLIES = "kindler.reply."  # and a name of the client's own
REPLIES_KEPT_S = 3600.0  # after the last use
