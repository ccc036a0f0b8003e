"""The pages, a module each. A module that defines ``PAGE`` (``gpuherd.web.page.Page``) is in the navigation."""
