"""The reference of the components, generated from what they declare: pages, catalogue, stubs for editors."""
