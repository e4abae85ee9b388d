"""Execute on stored things elsewhere: verbs of models and scripts become tasks, and tasks become results.

A call goes one way: `proxies` (the verbs that users call) -> `messages` (a frame of known layout, never a
pickle) -> an engine (`local`: processes of this machine; `broker`: Celery) -> `worker` -> `executor` (what
a verb does), and its reports come back to a `Handle`.
"""
