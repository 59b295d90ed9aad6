"""Programs on the library's public interface, each readable in one sitting."""
