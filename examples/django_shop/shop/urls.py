"""The views: place an order, and read the result of a task."""

from __future__ import annotations

from django.db import transaction
from django.http import HttpRequest, JsonResponse
from django.urls import path
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_POST

from shop.tasks import count, send_parcel


@csrf_exempt
@require_POST
def order(request: HttpRequest, number: int) -> JsonResponse:
    with transaction.atomic():  # the order would be saved here
        parcel = send_parcel.enqueue(number)
        counted = count.enqueue(order=number)
    return JsonResponse({"parcel": parcel.id, "count": counted.id})


def show_result(request: HttpRequest, result_id: str) -> JsonResponse:
    result = send_parcel.get_backend().get_result(result_id)
    value = result.return_value if result.status == "SUCCESSFUL" else None
    return JsonResponse({"status": result.status, "value": value, "attempts": result.attempts})


urlpatterns = [path("parcels/<int:number>", order), path("results/<str:result_id>", show_result)]
