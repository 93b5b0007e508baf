"""Pictures of results: matplotlib figures and self-contained HTML, both from the same panels."""
