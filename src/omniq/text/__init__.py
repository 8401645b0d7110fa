"""Text for people and for other programs.

- `masking`: hides secrets in URLs and text
- `escaping`: makes control characters visible
- `to_json`: any stored value as JSON
"""
