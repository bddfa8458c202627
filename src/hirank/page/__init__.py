"""What every result of hirank is shown with: pages, charts, units, files that are whole."""
