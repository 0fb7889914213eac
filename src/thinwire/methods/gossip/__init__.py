"""Decentralized methods: every replica exchanges weights with its neighbours in a graph."""
