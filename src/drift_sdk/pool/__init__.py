"""EnginePool: engines behind the methods of one, and the routing of requests to them."""
