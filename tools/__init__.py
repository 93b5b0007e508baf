"""Tools for maintainers that generate pages and tables from measurements; not installed."""
