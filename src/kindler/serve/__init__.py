"""Stored models behind HTTP and gRPC: four protocols, micro-batches, keys, and swaps that no client notices.

A prediction goes one way: `app` (its id, and which route) -> `predictions` -> `auth` (who may) -> `bodies`
(limits, and where a body is read) -> `protocols` (bytes to arrays) -> `model_registry` (which version) ->
`batching` (rows of several requests in one call) -> `kindler.models` (one interface for every kind of model),
and back. Everything else is an endpoint of FastAPI: `inference_routes`, `catalog_routes`, `tasks`, and `page`
for the web page.
"""
