"""The HTTP dialect of GCS: routes, bodies of several parts, a handler for each resource."""
