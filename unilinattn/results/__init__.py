"""Results: labelled scores, their files, and their pictures and pages."""
