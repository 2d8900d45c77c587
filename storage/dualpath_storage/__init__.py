"""Full Block store: geometry, segment files, checksums. Knows no SGLang, torch or Redis."""
