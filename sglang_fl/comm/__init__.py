"""Layer 3: every collective and point-to-point transfer of a group, on the backend its ranks agreed on."""
