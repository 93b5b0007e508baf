"""Drawing primitives for pictures and pages: colours, HTML blocks, heat maps and strips."""
