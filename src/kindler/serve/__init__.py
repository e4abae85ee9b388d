"""Stored models behind HTTP: several protocols, micro-batches, keys, and swaps that no client notices.

A request goes one way: `gate` (who may) -> `front` (which route) -> `protocols` (bytes to arrays) ->
`residents` (which version, loaded) -> `batching` (rows of several requests in one call) -> `kindler.models`
(one face for every kind of model), and back. Everything that is not a prediction is in `routes`, on FastAPI;
the web page is in `page`.
"""
