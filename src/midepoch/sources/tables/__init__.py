"""Snapshots of Delta, Iceberg and Lance tables: their files, schema and deleted rows, pinned when a table is opened."""
