"""Bridges to other libraries; each needs the one it is named after."""
