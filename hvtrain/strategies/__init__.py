"""Strategies of cooperation between ranks. The runner uses the interface of base.Strategy alone."""
