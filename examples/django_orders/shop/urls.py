"""Where things are."""

from django.contrib import admin
from django.urls import include, path

from oncehook.contrib.django.urls import dashboard

urlpatterns = [
    path("admin/", admin.site.urls),
    path("hooks/", include("oncehook.contrib.django.urls")),
    path("inbox/", dashboard()),  # for whoever is logged in as staff
]
