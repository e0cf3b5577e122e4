"""Adapters for trainers: docs/integrations/. Each is a module that imports its framework; importing this imports none."""
