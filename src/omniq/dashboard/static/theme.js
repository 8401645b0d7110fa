// Applies the chosen theme before the page is drawn.
"use strict";
try {
  const theme = localStorage.getItem("omniq-theme");
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
} catch (error) {
  // Without storage the theme of the system applies.
}
