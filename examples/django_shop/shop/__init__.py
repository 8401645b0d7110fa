"""A shop that sends parcels."""
