"""Runs stored models and scripts on workers: a method call becomes a task, and a task a result.

A call goes one way: `runtime` (the methods that users call) -> `messages` (a frame of known layout, never a
pickle) -> an engine (`local`: processes of this machine; `broker`: Redis or RabbitMQ) -> `executor` (a
process, and what a verb does), and its reports come back to a `TaskHandle`.
"""
