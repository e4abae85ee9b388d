"""Fixed time limits of runs, in seconds. `RunSettings` has those that users set.

Always read them as `limits.NAME`, so that one place changes them.
"""

from __future__ import annotations

# How often a loop that waits for several things looks again.
POLL_S = 0.1  # a worker process that is being started, or asked for its stacks
TICK_S = 0.2  # servers and the watch over a gang
LAST_TICK_S = 0.01  # all ranks have ended, and what started them follows in a moment
CALL_TICK_S = 0.25  # a rank that answers calls
WAKE_S = 1.0  # waits that are woken by what they wait for, and look in case they were not

# Connections.
GREETING_S = 10.0  # to prove to know the secret, and to say who it is
TASK_GREETING_S = 30.0  # the same for Spark tasks, on machines that are busy with many of them
SEND_S = 120.0  # to take anything of what is sent
CLOSE_S = 5.0  # for other threads to end, or to let go of a channel that is being closed
ACCEPT_PAUSE_S = 0.2  # after the process ran out of file descriptors
CONNECT_S = 60.0  # for a task to reach a node of a cluster
FIRST_RETRY_S, MAX_RETRY_S = 0.005, 0.1  # between two calls of a rank that does not listen yet

# Worker processes.
FORK_ANSWER_S = 2.0  # a fork server that has nothing to import answers in milliseconds
FORK_REQUEST_S = 10.0  # for the rest of a request after its first byte
OWNER_CHECK_S = 1.0  # between two looks whether the owner of a fork server lives
ADOPTION_S = 20.0  # a fork server whose executor has died, for another executor on its machine
SWEEP_S = 5.0  # for those that asked for killed children to end, and leave files behind
GPU_QUERY_S = 30.0  # nvidia-smi
STACKS_S = 10.0  # a worker to write down its stacks
STOPPED_STACKS_S = 2.0  # a worker that is stopped: nothing will come
GANG_STACKS_S = 15.0  # all workers of a gang to write down theirs
RESULT_S = 120.0  # the driver to take a result
EXIT_S = 10.0  # the news of an exit, when nobody has asked for it
ROOT_CAUSE_S = 1.0  # a broken exchange is news from the neighbour of the one that failed
LOSS_S = 5.0  # the news that a worker has died, after an exchange with it has failed
STRAGGLERS_S = 1.0  # workers that live, in an exchange that another one died in
HALT_S = 10.0  # ranks to say which step they are in
NOTICE_POLL_S = 1.0  # between two looks at where the notice to a machine appears
NOTICE_ANSWER_S = 1.0  # a machine's metadata service to answer
LONGEST_RETRY_S = 30.0  # before the workers of a run that lost some are started again

# Reports of workers, and what the driver shows of them.
PROGRESS_S = 0.1  # between two reports of an epoch's progress
STEP_LOSSES_S = 0.5  # between two reports of the losses of steps
LOSS_LOOK_S = 0.1  # between two looks at losses that are still being computed
FLUSH_S = 1.0  # between two moments at which readers of event files see more
INGEST_FIRST_S, INGEST_REDRAWN_S, INGEST_PRINTED_S = 1.0, 0.2, 10.0  # rows on their way from Spark

# Clusters.
RESULTS_S = 10.0  # a program that asks for rows while all wait for its results
RETRY_NODES_S = 0.5  # between two rounds of trying to reach any node
UNREACHED_S = 5.0  # for any node to be reached
